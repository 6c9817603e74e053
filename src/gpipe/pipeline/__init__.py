"""The pipeline engine; it needs torch and nothing else. This page is its map.

A mini-batch is cut into M micro-batches, the model into K stages. One training step, K = 3, M = 3:

    stage 0   F0 F1 F2 R2             B2 R1 B1 R0 B0   F: forward, which keeps no autograd graph
    stage 1      F0 F1 F2 R2       B2 R1 B1 R0 B0      R: recomputation, the forward again with a graph
    stage 2         F0 F1 F2 R2 B2 R1 B1 R0 B0         B: backward
                    |        |                      |
                    |        loss of micro-batch 2  gradients complete: norms, moving averages, report
                    boundary output of stage 1, micro-batch 0

Each task has its micro-batch's number. A boundary is what passes from one stage to the next. A nest is a tensor, or
tuples, lists and dicts of tensors. A graph is autograd's.

These ten files are the engine. Read them in this order:

    microbatch.py          cut a mini-batch; take a nest of tensors apart and rebuild it
    partition.py           cut the model: which layers each stage gets
    schedule.py            the tasks of a step, drawn device by device
    randomness.py          seeds as a function of integers
    batch_norm.py          normalise each micro-batch and keep its statistics
    loss.py                the mini-batch's loss from its micro-batches
    stage.py               forward, recomputation, backward; first the top of entry, buffers, first_forward in layers/
    transfer.py            the boundary between two stages, in one process
    engine.py              Pipeline: one loop runs the tasks, to train, to evaluate and to find faults
    timeline.py            when each task ran; the bubble

The folders beside them are for looking up.

wire/, the boundary between processes.
job/, the processes: agreement, failures.
shared/, a parameter in several places: tied parameters, replicas.

schedules/, orders of tasks other than GPipe's:

    one_forward_one_backward.py    1F1B, interleaved or not
    zero_bubble.py         schedules that split backwards
    choice.py              a schedule by name, or a user's own, checked; the tasks of each process

layers/, how layers run:

    initialization.py      memory and initial weights for layers on the meta device
    execution.py           as they are, or in one of the next three ways
    compilation.py         through torch.compile
    cuda_graphs.py         as CUDA graphs
    device_threads.py      with a launching thread per GPU
    first_forward.py       forwards that keep no graph
    entry.py               where a stage's graph begins
    buffers.py             buffers change in the forward, and not again in the recomputation
    split_backward.py      gradients of weights that wait, for schedules that split backwards
    new_gradients.py       gradients that autograd leaves in one memory, separated
    autocast.py            weights are converted once per step
    low_precision.py       what travels in 16 bits
    generators.py          the global random generators: restored, and watched
    evaluation_mode.py     evaluation mode for the length of a block
    structure.py           which layers do the same work

step_end/, once the last task has run:

    conclusion.py          a step's outcome: norms, faults, notes, clipping
    moving_statistics.py   moving averages, updated once per mini-batch
    gradient_norm.py       the norm of all gradients
    gradient_scaler.py     scaling the loss for float16
    parameter_hooks.py     users' hooks, called once per step
    outputs.py             the micro-batches' outputs, concatenated

checks/:

    refusals.py            what the pipeline would ignore, and so refuses
    loss_function.py       what is expected of a loss, and what torch's losses average over
    recomputation_check.py recomputed outputs compared with those of the forward
    current_layer.py       the layer now running, for messages

measurement/:

    clock.py               times tasks, on the host or on a GPU
    step_report.py         what a step reports
    trace.py               a timeline as a file for Perfetto

Two files are for all: nothing.py, an empty context; _compat.py, private interfaces of torch.

Torch's own checkpointing (torch.utils.checkpoint) is not used: it recomputes inside backward, once the gradient has
arrived. Here recomputation is a task of its own, which runs while the gradient is awaited. `stage.py` has the other
reasons.
"""
