"""A process that has imported everything and forks trainers: a crash costs a second instead of five.

It has run no operation and holds no thread, so its children are as good as new processes. Requests and answers are
JSON lines. ``harness.Zygote`` is the other end.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch._dynamo  # the optimizer imports it: 0.7 s that each child would pay

from tests.faults import trainer

torch.set_num_threads(1)


def child(request: dict[str, object], rank: int) -> None:
    """Become rank ``rank`` of the run."""
    os.setpgid(0, 0)
    os.environ.update(request["env"])  # type: ignore[call-overload]
    world_size = int(str(request["ranks"]))
    if world_size > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
    log = os.open(str(request["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = ["trainer.py", *request["argv"]]  # type: ignore[misc]
    code = 1
    try:
        exec(os.environ.get("FAULT_PATCH", ""), {})
        trainer.run_main(trainer.main)
    except SystemExit as left:
        code = int(left.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        answer: object
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            pids: list[int] = []
            for rank in range(request["ranks"]):
                pid = os.fork()
                if pid == 0:
                    sys.stdin.close()
                    child(request, rank)
                pids.append(pid)
            answer = pids
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    assert Path("tests/faults/zygote.py").exists()
    main()
