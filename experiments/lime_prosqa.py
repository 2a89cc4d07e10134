"""LIMe, section 5.4.1: finetuned on ProsQA, chains of facts through a graph, LIMe answers more questions than LLaMA (77.8 and 69.4%; guessing gets half).

From lime_routers' models of the same scale, which run first. The paper's learning rate, batch of 128 and 10 epochs over 18,000 samples, in rows of 589
tokens. Only at scale gpu. The paper's training set is not published: these samples are generated, and the figures are not comparable, the order is.
`--dataset=` takes a folder made with `experiments/tasks.py prosqa --val=prosqa_test.json.xz`, whose held-out questions are the published ones."""
model, metric, baseline, seeds = "lime", "accuracy", "LLaMA", 3
prepare = "experiments/tasks.py prosqa --samples=18000 --out=data/prosqa"
gpu = dict(preset="150m", batch_size=16, batch_tokens=128 * 589, max_iters=1406, warmup_iters=141, eval_interval=281, eval_tokens=1000 * 589,
           optimizer="adamw", learning_rate=1e-4, schedule="wsd", warmdown=0.9, sample_tokens=0)      # falls linearly from the warm-up's end
variants = {
    "LLaMA": (dict(dense=True, init_from="@lime_routers/LLaMA"), .694),
    "LIMe": (dict(init_from="@lime_routers/LIMe"), .778),
}
claims = ["LIMe > LLaMA"]
