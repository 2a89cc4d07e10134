"""MoVE, Table 3 (D12): inside multi-head latent attention LaVE stops at x1 and beats MoVE there;
MoVE falls steadily with its slots."""
from experiments.move_table1 import cpu, gpu, prepare

model = "move"
metric = "val_bpb"
baseline = "MLA"
seeds = 3
variants = {                                                    # overrides, the paper's D12 number
    "MLA": (dict(attention="mla", dense=True), .8826),
    "LaVE x1": (dict(attention="mla", memory="lave", memory_scale=1), .8803),
    "LaVE x2": (dict(attention="mla", memory="lave", memory_scale=2), .8806),
    "MoVE x1": (dict(attention="mla", memory="move", memory_scale=1), .8822),
    "MoVE x2": (dict(attention="mla", memory="move", memory_scale=2), .8805),
    "MoVE x4": (dict(attention="mla", memory="move", memory_scale=4), .8782),
    "MoVE x8": (dict(attention="mla", memory="move", memory_scale=8), .8762),
}
claims = ["MoVE x1 > LaVE x1", "LaVE x2 > LaVE x1",
          "MLA > MoVE x1 > MoVE x2 > MoVE x4 > MoVE x8"]
