"""Plan a run before anything is launched: the cut into stages, and their memory, seconds and bubble.

A model is described layer by layer, cut into stages, and its step simulated. Read the files in this order:

    profile.py           what each layer computes, keeps and sends
    accelerator.py       how long that takes on a device: the roofline
    cut.py               the cut into stages; exact_cut.py has the optimum for given costs
    memory.py            what each device holds in a step; evaluation.py, what it holds in an evaluation
    simulation.py        when each task runs
    step.py              all of it: the plan of a step
    planner.py           one model on accelerators of one kind, and what would fit if it does not
    search.py            the fastest of all plans; bound.py spares it the hopeless ones

Behind the profile:

    observed_model.py    the model, run on tensors without data; without_data.py makes these
    ledger.py            what operations allocate and compute meanwhile; operation_memory.py, what they use internally
    repeats.py           of identical layers, three are profiled
    interpolation.py     micro-batches of many sizes, from two
    optimizer_memory.py  what an optimiser keeps
    fit.py               rematerialize=fit: as many graphs as fit

Measured instead of planned:

    timing.py            the seconds of each layer; task_timing.py, what the engine adds
    calibration.py       these, stored for later plans

To read: report.py prints a plan, picture.py draws timelines, errors.py names what cannot be planned.
"""
