"""What each program does with its checked settings.

A run of train.py meets these files in this order:

    complete.py          fills in what the data or the model determines
    resume.py            finds the folder, a new one or that of an unfinished run; folder_lock.py locks it
    train.py             starts the processes; each of them goes through the rest
    chosen_checkpoint.py checks the checkpoints that the settings name
    layout.py            plans, and shares the plan with all processes
    build.py             builds layers, pipeline and trainer; workloads/ has what differs between families of models
    outcome.py           writes the record, and prints the outcome

Other programs and modes, each in the file of its name:

    plan.py, evaluate.py, predict.py, translate.py, bleu.py, train_tokenizer.py
    automatic.py         pipeline=auto
    calibrate.py         plan.py calibrate=true; calibration_files.py keeps what it measured
    sweep.py             --multirun: grids and searches; jobs.py has the outcome of each

Helpers: precision.py chooses data types and kernels, trained.py finds trained models.
"""
