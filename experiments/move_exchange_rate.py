"""MoVE, section 5's open question: how many slots are worth a layer? MoVE at depth L against the
standard model at L+1 and L+2.

The dial makes a deeper model wider too. "same FLOPs" rows take fewer steps, so that the whole run
costs what MoVE x1 costs (by flops_per_token, attention included); the step time column says what
the clock made of it. The paper has no numbers here.
"""
from experiments.move_table1 import cpu, gpu, prepare

model = "move"
metric = "val_bpb"
baseline = "standard"
seeds = 3
variants = {
    "standard": (dict(dense=True), None),
    "MoVE x1": (dict(memory="move", memory_scale=1), None),
    "MoVE x4": (dict(memory="move", memory_scale=4), None, 1),
    "MoVE x8": (dict(memory="move", memory_scale=8), None, 1),
    "L+1 same FLOPs": (dict(dense=True, cpu=dict(depth=5, max_iters=571),
                            gpu=dict(depth=13, max_iters=830)), None),
    "L+2 same FLOPs": (dict(dense=True, cpu=dict(depth=6, max_iters=352),
                            gpu=dict(depth=14, max_iters=694)), None, 1),
    "L+1 same steps": (dict(dense=True, cpu=dict(depth=5), gpu=dict(depth=13)), None, 1),
    "L+2 same steps": (dict(dense=True, cpu=dict(depth=6), gpu=dict(depth=14)), None, 1),
}
claims = [                                                      # questions rather
    "L+1 same FLOPs > MoVE x1", "L+2 same FLOPs > MoVE x1", "L+1 same steps > MoVE x1",
    "L+1 same steps > MoVE x8", "L+2 same steps > MoVE x8",
]
