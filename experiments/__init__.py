"""Studies that need more than one run of train.py.

A study is a file or a folder. Run it with `python -m experiments.<study>` in the root of the repository. It prints its
tables on standard output and changes no file. `--record` also adds its records to its claim in reproductions/ and
renders all pages; `--record FOLDER` adds them to FOLDER/runs.jsonl. `--help` lists the other options.

In a folder, `__main__.py` is the program, and the other files are its parts. `program.py` has what all studies share,
`tuning.py` what those share that train models, `turns.py` what those share that measure seconds, and `processes.py`
what those share that measure several processes. `data/` prepares the data sets that come with the package.
"""
