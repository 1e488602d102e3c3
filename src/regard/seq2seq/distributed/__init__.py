"""Several devices and several processes: who takes part, and who holds what."""
