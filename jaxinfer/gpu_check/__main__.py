"""Compile one program and print its result as JSON: the process that a compiler may crash."""

from __future__ import annotations

import argparse
import json

from jaxinfer.gpu_check.cases import Served, make_plan
from jaxinfer.gpu_check.checks import examine
from jaxinfer.gpu_check.target import TARGETS
from jaxinfer.quantization.kinds import KINDS, NONE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=TARGETS, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--ways", type=int, required=True)
    parser.add_argument("--quantization", choices=(NONE, *KINDS), default=NONE)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--program", required=True)
    args = parser.parse_args()
    served = Served(args.model, args.ways, args.quantization)
    plan = make_plan(TARGETS[args.target], served, args.layers)
    program = plan.programs[args.program]
    result = examine(program, plan.expectation(program), plan.model.mesh)
    print(json.dumps(result.to_json()))


if __name__ == "__main__":
    main()
