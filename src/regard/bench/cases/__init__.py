"""What is computed: named cases, their inputs and their float64 answers."""
