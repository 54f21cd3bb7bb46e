"""What people change between two runs: pairs of a script that saves and a script that loads.

Of each pair, DeepSpeed alone is asked first where the topology is unchanged. Where it completes and what it restores is right
by names, elastic_ckpt restores it, too, or refuses with a remedy that does; whatever elastic_ckpt completes is right.

``python -m tests.drawn changes --minutes M --seed S`` draws them.
"""
