"""UltraMemV2's ablations (Figures 2 to 4, 6, 7, 9 to 13, Table 1), each at equal work. The paper's are in training loss at 430M/5B, Figures 10 to 13 at
500M/6.8B, Table 1 at 2.5B/60B and 120B; Figure 7's in validation loss.

Many of them are thousandths, read off curves where no number is printed: "inside noise" is what to expect at a small size."""
model, metric, baseline, seeds = "ultramem", "val_loss", "V2", 2
prepare = dict(cpu="--source=fineweb_edu --tokenizer=bpe --vocab_size=4096 --max_tokens=20_000_000 --out=data/fineweb_edu_bpe4096",
               gpu="--source=fineweb_edu --max_tokens=200_000_000 --out=data/fineweb_edu_200M")
cpu = dict(depth=4, block_size=256, batch_size=4, batch_tokens=1024, max_iters=1024, eval_interval=256, eval_tokens=131072, sample_tokens=0,
           schedule="wsd", learning_rate=4e-4, value_dim=64, pre_value_dim=64)    # 1.05M tokens; V2 is ultramem_table3's
gpu = dict(depth=12, block_size=1024, batch_tokens=131072, max_iters=1000, eval_interval=200, value_dim=192, pre_value_dim=192)
each = lambda cpu, gpu, **same: dict(same, cpu=cpu, gpu=gpu)
half = each(dict(n_keys=146), dict(n_keys=254))                  # n / sqrt(2): half the slots
balanced = dict(balance_loss=0.001)
variants = {
    "V2": (dict(), None),
    # Figure 2: PEER's pre-values against plain values: n * sqrt(2) (automatic) and 2m of them are as many parameters and reads
    "plain values": (dict(pre_value_dim=0, top_m=64), None),
    # Figure 3: from virtual blocks with a projector each and one query for both ranks to virtual blocks with one projector and a query per rank (-0.0026)
    "virtual blocks": (dict(virtual=4), None),
    "four projectors and one query": (each(dict(key_dim=64), dict(key_dim=192), virtual=4, projectors=4, rank_queries=0), None),
    # Figure 4: two heads of half D_k and half m (one head: -0.0008)
    "two heads": (each(dict(key_dim=32), dict(key_dim=96), heads=2, top_m=16), None),
    # Figure 7: fewer memory layers with as many reads a token in all: validation loss soon equal, benchmarks better with more
    "1 memory layer": (each(dict(mem_layers="2", top_m=128), dict(mem_layers="6", top_m=384)), None),
    "2 memory layers": (each(dict(mem_layers="1,3", top_m=64), dict(mem_layers="5,11", top_m=192)), None),
    # Figure 6: with half of D_v + D_p, more slots and reads the loss is lower; so it is with D_v = 3 D_p
    "half of D_v + D_p": (each(dict(value_dim=32, pre_value_dim=32, top_m=64), dict(value_dim=96, pre_value_dim=96, top_m=64)), None),
    "D_v = 3 D_p": (each(dict(value_dim=96, pre_value_dim=32), dict(value_dim=288, pre_value_dim=96)), None),
    # Table 1: more reads (there thrice, here twice) against twice the slots (training loss 1.769 and 1.752 after 1.6T tokens; on benchmarks reads win)
    "half the slots": (half, None), "half the slots with 2m": (dict(top_m=64, **half), None),
    # Figure 13: values start at four times the rate
    "value lr 4x": (dict(value_lr=4.0), None),
    # Appendix 6's derivation cuts the activation's input off at 0: a SwiGLU as it is starts 1.8 times smaller, and so do these memories
    "as small as SwiGLU": (dict(init_match="silu"), None),
    # Figure 9: the balance loss helps where 1.0e-4 of the values are read and harms where 2.0e-4 are: 0.93e-4 and 1.9e-4 with m 4 and 8 (gpu: 12 and 25)
    "fewest reads": (each(dict(top_m=4), dict(top_m=12)), None), "fewest reads balanced": (each(dict(top_m=4), dict(top_m=12), **balanced), None),
    "few reads": (each(dict(top_m=8), dict(top_m=25)), None), "few reads balanced": (each(dict(top_m=8), dict(top_m=25), **balanced), None),
    # not in the paper: with all reads (7.5e-4 of the values; gpu: 2.5e-4), for 2,048 tokens read half of a new V2's slots and 6 to 17% of a trained one's
    "V2 balanced": (balanced, None),
    # Figures 10 to 12: tables that neighbouring layers share; of ring and no-ring no-ring has the lower training loss
    "ring": (each(dict(share="ring:3"), dict(share="ring:4")), None), "no-ring": (each(dict(share="noring:3"), dict(share="noring:4")), None),
    "block": (each(dict(share="block:2"), dict(share="block:4")), None),
}
claims = ["plain values > V2", "four projectors and one query > virtual blocks", "two heads > V2", "V2 > half of D_v + D_p", "V2 > D_v = 3 D_p",
          "half the slots > half the slots with 2m", "half the slots > V2", "half the slots with 2m > V2", "V2 > value lr 4x",
          "fewest reads > fewest reads balanced", "few reads balanced > few reads", "V2 > V2 balanced", "V2 > ring", "ring > no-ring", "V2 > block", "block > ring"]
