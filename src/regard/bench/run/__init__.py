"""Measuring: timing loops, worker processes, the machine's description, tuning."""
