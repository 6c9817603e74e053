"""What happens once the last task of a step has run: norms, clipping, averages, outputs."""
