"""One of hivemind's averagers, for comparison with ours (`averaging.py`).

    python benchmarks/_hivemind_averager.py NUMBER PROCESSES MILLIONS

Runs with the packages that PEERLOOM_HIVEMIND names. It reads JSON documents, one per line, and answers each
with one.
"""

import json
import sys
import time
import warnings

warnings.filterwarnings("ignore")
OURS = sys.stdout
sys.stdout = sys.stderr  # stdout is reserved for the answers


def say(**document: object) -> None:
    print(json.dumps(document), file=OURS, flush=True)


def main() -> None:
    """Average incoming vectors, until the input ends."""
    import numpy as np
    import torch
    from hivemind import DHT
    from hivemind.averaging import DecentralizedAverager

    number, processes, items = int(sys.argv[1]), int(sys.argv[2]), int(float(sys.argv[3]) * 10**6)
    torch.set_num_threads(1)
    seeds = json.loads(sys.stdin.readline())["seeds"]
    dht = DHT(
        initial_peers=seeds,
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        use_ipfs=False,
        use_relay=False,
        use_auto_relay=False,
        start=True,
    )
    vector = torch.from_numpy(np.random.default_rng(number).standard_normal(items, np.float32))
    averager = DecentralizedAverager(
        [vector.clone()],
        dht,
        prefix=f"benchmark{items}",
        target_group_size=processes,
        min_group_size=processes,
        min_matchmaking_time=1.0,
        request_timeout=0.5,
        allow_state_sharing=False,
        start=True,
    )
    say(addresses=[str(address) for address in dht.get_visible_maddrs()])
    for line in sys.stdin:
        is_grouped = json.loads(line)["is_grouped"]
        with averager.get_tensors() as tensors:
            tensors[0].copy_(vector)
        if is_grouped:
            # The group forms before the trigger if possible, as in hivemind's optimizer.
            control = averager.step(wait=False, require_trigger=True, timeout=120)
            while control.stage.name != "AWAITING_TRIGGER":
                time.sleep(0.01)
        say(ready=True)
        sys.stdin.readline()
        begun = time.perf_counter()
        if is_grouped:
            control.allow_allreduce()
            found = control.result(120)
        else:
            found = averager.step(timeout=120)
        seconds = time.perf_counter() - begun
        with averager.get_tensors() as tensors:
            shown = tensors[0][:1_000].tolist()
        say(seconds=seconds, group=0 if found is None else len(found), shown=shown)
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
