"""Several devices and several processes: how they are found, and what each of them holds."""
