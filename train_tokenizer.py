"""Train a SentencePiece vocabulary on your own parallel text. See `--help`."""

from gpipe.programs.train_tokenizer import main

if __name__ == "__main__":
    main()
