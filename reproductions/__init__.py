"""Records of runs, and the tables and plots that are made of them."""
