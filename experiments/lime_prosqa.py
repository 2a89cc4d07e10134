"""LIMe, section 5.4.1: finetuned on ProsQA, chains of facts through a graph, LIMe answers more
questions than LLaMA (77.8 and 69.4%).

Guessing gets half. But always to take the option that is farther from the graph's roots gets nine
of ten or more: that is how the task is made. So "true_chains" has the share of answers, right or
not, whose steps are facts of the question that follow from one another.

gpu: from lime_routers' models, which run first, with the paper's rate, batch of 128 and 10 epochs
over 18,000 samples in rows of 589 tokens. cpu: from scratch, a token a word, 100,000 graphs of 10
nodes (published: 23), 16 in a batch (in batches of 64, or with heads 16 wide, a model learns the
form of a chain but not to look facts up), also at three times the rate. The training samples are
generated, not the published ones: the figures are not comparable, the order is. `--dataset=` takes
a folder made with `experiments/tasks.py prosqa --val=prosqa_test.json.xz`, whose held-out questions
are the published ones.
"""
model = "lime"
metric = "accuracy"
also = ("true_chains", "val_loss")
baseline = "LLaMA"
seeds = 3
prepare = dict(
    cpu="experiments/tasks.py prosqa --samples=100000 --nodes=10 --out=data/prosqa_10",
    gpu="experiments/tasks.py prosqa --samples=18000 --tokenizer=gpt2 --out=data/prosqa")
cpu = dict(depth=4, n_embd=128, n_head=4, batch_size=16, batch_tokens=16 * 150, max_iters=9000,
           eval_interval=1125, eval_tokens=1000 * 150, optimizer="adamw", learning_rate=1e-3,
           schedule="wsd", warmup=0.1, warmdown=0.9, sample_tokens=0)    # 1.4 epochs
gpu = dict(preset="150m", batch_size=16, batch_tokens=128 * 589, max_iters=1406, warmup=0.1,
           eval_interval=175, eval_tokens=1000 * 589, optimizer="adamw", learning_rate=1e-4,
           schedule="wsd", warmdown=0.9, sample_tokens=0)       # falls from the warm-up's end on
variants = {
    "LLaMA": (dict(dense=True, gpu=dict(init_from="@lime_routers/LLaMA")), .694),
    "LIMe": (dict(gpu=dict(init_from="@lime_routers/LIMe")), .778),
    "LLaMA at 0.003": (dict(dense=True, learning_rate=3e-3, gpu=None), None, 1),
    "LIMe at 0.003": (dict(learning_rate=3e-3, router_lr=10 / 3, gpu=None), None, 1),
}
claims = ["LIMe > LLaMA", "true_chains: LIMe > LLaMA", "LIMe at 0.003 > LLaMA at 0.003"]
