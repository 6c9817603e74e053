"""Score a trained translation model with BLEU and chrF. See `--help`."""

from gpipe.programs.bleu import main

if __name__ == "__main__":
    main()
