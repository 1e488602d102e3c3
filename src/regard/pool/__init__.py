"""Step 4, pool: the weighted sum of the values; one backend per file, all equal to reference."""
