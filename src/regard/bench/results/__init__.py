"""What came out: records, targets, tables and pictures."""
