import sys

from elastic_ckpt.ds_to_universal import main, parse_arguments
from elastic_ckpt.errors import ElasticCkptError

try:
    main(parse_arguments())
except ElasticCkptError as error:
    sys.exit(f"{type(error).__name__}: {error}")
