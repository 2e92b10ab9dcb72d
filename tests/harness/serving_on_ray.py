"""Two replicas of a tiny model on a Ray of their own, until a line is read: serving_on_ray.py PORT STATE."""

from __future__ import annotations

import sys
from functools import partial

import torch

from come.serve import Service
from come.testing import NORMS, TinyClassifier


def make(part, parts, state):
    torch.set_num_threads(1)
    model = TinyClassifier(NORMS["group"])
    write_every = 0.0 if part == 0 else 1000.0  # part 0 is killed; part 1 writes when it is ended
    return Service(model, shape=(3, 8, 8), lr=0.01, state=state, part=part, parts=parts, write_every=write_every)


if __name__ == "__main__":
    try:
        import ray

        from come.serve.ray_serve import application, serve
    except ImportError:
        sys.exit(print("missing"))
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    options = {"ray_actor_options": {"num_cpus": 0.1}, "health_check_period_s": 1.0}
    serve.run(application(partial(make, state=sys.argv[2]), 2, **options), name="come")
    print("pid", serve.get_deployment_handle("part-0", "come").about.remote().result()["pid"], flush=True)
    sys.stdin.readline()
    serve.shutdown()
    ray.shutdown()
