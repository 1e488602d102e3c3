"""The programs that compute a case: regard and the other libraries, each as a program to time."""
