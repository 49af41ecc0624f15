"""One engine over several processes, each with a part of the model: tensor parallelism."""
