"""The pipeline engine; needs torch and nothing else. This page is its map.

A mini-batch is cut into M micro-batches, the model into K stages. One training step, K = 3, M = 3:

    stage 0   F0 F1 F2 R2             B2 R1 B1 R0 B0   F: forward; keeps no autograd graph
    stage 1      F0 F1 F2 R2       B2 R1 B1 R0 B0      R: recomputation: the forward again, with a graph
    stage 2         F0 F1 F2 R2 B2 R1 B1 R0 B0         B: backward
                    |        |                      |
                    |        loss of micro-batch 2  gradients are whole: norms, moving averages, report
                    boundary output of stage 1, micro-batch 0

Read these ten files in this order; they are the engine. A boundary is what passes from one stage to the next; a nest is
a tensor, or tuples, lists and dicts of tensors; a graph is autograd's. Before stage.py, read the heads of entry.py,
buffers.py and first_forward.py, on which it leans.

    microbatch.py  a mini-batch is cut; a nest of tensors is taken apart and rebuilt
    partition.py   the model is cut: which layers each stage gets
    schedule.py    the tasks of a step, device by device, drawn
    randomness.py  seeds as a function of integers
    batch_norm.py  normalise by the micro-batch, and keep its statistics
    loss.py        the mini-batch's loss from micro-batches
    stage.py       forward, recomputation, backward; why torch's own checkpointing is not used
    transfer.py    the boundary between two stages, in one process
    engine.py      Pipeline: one loop runs tasks, to train, to evaluate and to look for faults
    timeline.py    when tasks ran: events, bubble

Beside them, for when you need them:

    wire/                  the boundary between processes
    job/                   the processes: agreement, failures
    shared/                tied parameters, replicas
    one_forward_one_backward.py  1F1B, interleaved or not
    zero_bubble.py         schedules that split backwards
    split_backward.py      gradients of weights wait, for these schedules
    schedule_choice.py     a schedule by name, or a user's own, and what of it a process runs
    moving_statistics.py   the moving averages of the mini-batch
    buffers.py             other layers' averages and buffers, which a forward moves and a recomputation does not
    execution.py           how layers run: as they are, or in one of the next three ways
    compilation.py         layers through torch.compile
    cuda_graphs.py         layers as CUDA graphs
    device_threads.py      a launching thread per GPU of a process
    conclusion.py          what a step came to: norms, faults, notes, clipping
    gradient_norm.py       the norm of all gradients
    gradient_scaler.py     the loss is scaled for float16
    parameter_hooks.py     users' hooks are called once per step
    step_report.py         what a step reports
    clock.py               when tasks run, on the host or on a GPU
    trace.py               a timeline, for Perfetto
    generators.py          the global generators of random numbers: restored, and watched
    current_layer.py       the layer under way, for messages
    refusals.py            what would be ignored
    outputs.py             outputs of micro-batches, put together
    evaluation_mode.py     evaluation mode for a while
    initialization.py      weights of layers on the meta device
    entry.py               where a stage's autograd graph begins
    first_forward.py       forwards that keep no graph
    recomputation_check.py forwards beside recomputations
    structure.py           which layers do the same work
    autocast.py            weights are converted once per step
    low_precision.py       what travels in 16 bits
    nothing.py, _compat.py an empty context; private interfaces of torch

Torch's own checkpointing (torch.utils.checkpoint) is not used: it recomputes inside backward, when the gradient has
arrived. Here recomputation is a task, which runs while the gradient is awaited. `stage.py` has the other reasons.
"""
