"""Training by the program of another project: its tree and interpreter, its way to start, watched from here."""
