"""UltraMemV2's ablations (Figures 2 to 4, 7, 9 to 13, section 4.1), each at equal work; the paper's differences are in training loss at 430M/5B.

Many of them are thousandths, read off curves where no number is printed: "inside noise" is what to expect at a small size."""
model, metric, baseline, seeds = "ultramem", "val_loss", "V2", 2
prepare = dict(cpu="--source=fineweb_edu --tokenizer=bpe --vocab_size=4096 --max_tokens=20_000_000 --out=data/fineweb_edu_bpe4096",
               gpu="--source=fineweb_edu --max_tokens=200_000_000 --out=data/fineweb_edu_200M")
cpu = dict(depth=4, block_size=256, batch_size=4, batch_tokens=1024, max_iters=1024, eval_interval=256, eval_tokens=131072, sample_tokens=0,
           learning_rate=12e-4, schedule="wsd")                                                       # 1.05M tokens, ultramem_table3's rates
gpu = dict(depth=12, block_size=1024, batch_tokens=131072, max_iters=1000, eval_interval=200)
half = dict(cpu=dict(n_keys=207), gpu=dict(n_keys=360))          # n / sqrt(2): half the slots
layers = {1: dict(cpu=dict(mem_layers="2", top_m=128), gpu=dict(mem_layers="6", top_m=384)),
          2: dict(cpu=dict(mem_layers="1,3", top_m=64), gpu=dict(mem_layers="5,11", top_m=192))}                      # a token's m over all layers stays
variants = {
    "V2": (dict(), None),
    # Figure 2: PEER's pre-values against plain values of the same width, that is with more slots (n, automatic) and more reads (m)
    "plain values": (dict(pre_value_dim=0, top_m=43), None),
    # Figure 3: UltraMem's virtual blocks with a projector each and one query for all ranks, against one projector and a query per rank (-0.0026)
    "four projectors and one query": (dict(virtual=4, projectors=4, rank_queries=0, cpu=dict(key_dim=64), gpu=dict(key_dim=192)), None),
    # Figure 4: two heads of half D_k and half m (one head: -0.0008)
    "two heads": (dict(heads=2, cpu=dict(key_dim=32, top_m=16), gpu=dict(key_dim=96, top_m=16)), None),
    # Figure 7: fewer memory layers with as many reads a token in all
    "1 memory layer": (layers[1], None),
    "2 memory layers": (layers[2], None),
    # section 4.1: twice the reads of a table against a table of twice the slots
    "half the slots": (half, None), "half the slots with 2m": (dict(top_m=64, **half), None),
    # Figure 13: values start at four times the rate
    "value lr 4x": (dict(value_lr=4.0), None),
    # Figure 9: the balance loss helps where few values are read (47) and harms where many are (94)
    "m 16": (dict(top_m=16), None), "m 16 balanced": (dict(top_m=16, balance_loss=0.001), None), "balanced": (dict(balance_loss=0.001), None),
    # Figures 10 to 12: tables that neighbouring layers share
    "ring 2": (dict(share="ring:2"), None), "no-ring 2": (dict(share="noring:2"), None), "block 2": (dict(share="block:2"), None),
}
claims = ["plain values > V2", "four projectors and one query > V2", "two heads > V2", "1 memory layer > 2 memory layers > V2",
          "half the slots > half the slots with 2m", "half the slots > V2", "V2 > half the slots with 2m", "V2 > value lr 4x", "m 16 > m 16 balanced",
          "balanced > V2", "V2 > ring 2", "ring 2 > no-ring 2", "V2 > block 2"]
