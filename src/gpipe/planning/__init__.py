"""What a run will do, said before anything is launched."""
