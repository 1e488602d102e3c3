"""Who computes it: regard and the other libraries, each as a program to time."""
