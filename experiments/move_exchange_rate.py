"""MoVE, section 5's open question: how many slots are worth a layer? MoVE at depth L against the standard model at L+1 and L+2.

The dial makes a deeper model wider too. "same FLOPs" rows take fewer steps, so that the whole run costs what MoVE x1 costs (by
flops_per_token, attention included); the step time column says what the clock made of it. The paper has no numbers here."""
model, metric, baseline, seeds = "move", "val_bpb", "standard", 3
prepare = dict(cpu="--source=fineweb_edu --tokenizer=bpe --vocab_size=4096 --max_tokens=20_000_000 --out=data/fineweb_edu_bpe4096",
               gpu="--source=fineweb_edu --max_tokens=200_000_000 --out=data/fineweb_edu_200M")
cpu = dict(depth=4, block_size=256, batch_tokens=4096, max_iters=366, eval_interval=183, eval_tokens=131072)     # 1.5M tokens a run
gpu = dict(depth=12, block_size=1024, batch_tokens=131072, max_iters=1000, eval_interval=1000)                  # 131M tokens a run
variants = {                                                     # overrides, no number in the paper, seeds
    "standard": (dict(dense=True), None),
    "MoVE x1": (dict(memory="move", memory_scale=1), None),
    "MoVE x4": (dict(memory="move", memory_scale=4), None, 1),
    "MoVE x8": (dict(memory="move", memory_scale=8), None, 1),
    "L+1 same FLOPs": (dict(dense=True, cpu=dict(depth=5, max_iters=209), gpu=dict(depth=13, max_iters=830)), None),
    "L+2 same FLOPs": (dict(dense=True, cpu=dict(depth=6, max_iters=129), gpu=dict(depth=14, max_iters=694)), None, 1),
    "L+1 same steps": (dict(dense=True, cpu=dict(depth=5), gpu=dict(depth=13)), None, 1),
    "L+2 same steps": (dict(dense=True, cpu=dict(depth=6), gpu=dict(depth=14)), None, 1),
}
claims = ["L+1 same FLOPs > MoVE x1", "L+2 same FLOPs > MoVE x1",   # questions rather: the paper leaves them open
          "L+1 same steps > MoVE x1", "L+1 same steps > MoVE x8", "L+2 same steps > MoVE x8"]
