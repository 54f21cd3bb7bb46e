"""What plain DeepSpeed completes at an unchanged topology, elastic_ckpt completes too, and leaves the same bits.

A flow is a choice on each axis that a job has: stage, optimizer, scheduler, client state, model, arguments and more. They
are drawn at random; one that fails is reduced to the choices that it needs.
"""
