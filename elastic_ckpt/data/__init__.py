"""The position in the data: samples that were trained on, whatever ranks, workers and prefetching there were."""

from elastic_ckpt.data.position import DataPosition as DataPosition
from elastic_ckpt.data.position import Trained as Trained
from elastic_ckpt.data.sampler import ElasticSampler as ElasticSampler
from elastic_ckpt.data.stream import ElasticStream as ElasticStream
