"""Compile programs of one plan and print a line of JSON for each: the process that a compiler may
crash."""

from __future__ import annotations

import argparse
import json
import traceback

from jaxinfer.gpu_check.cases import Served, make_plan
from jaxinfer.gpu_check.checks import Result, examine
from jaxinfer.gpu_check.target import TARGETS
from jaxinfer.page_dtypes import AUTO
from jaxinfer.quantization.kinds import KINDS, NONE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=TARGETS, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--ways", type=int, required=True)
    parser.add_argument("--quantization", choices=(NONE, *KINDS), default=NONE)
    parser.add_argument("--kv-dtype", default=AUTO)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--program", action="append", required=True)
    args = parser.parse_args()
    served = Served(args.model, args.ways, args.quantization, args.kv_dtype)
    plan = make_plan(TARGETS[args.target], served, args.layers)
    for name in args.program:
        program = plan.programs[name]
        try:
            result = examine(program, plan.expectation(program), plan.model.mesh)
        except Exception as error:
            result = Result(name, error=traceback.format_exception_only(error)[-1].strip())
        print(json.dumps(result.to_json()), flush=True)


if __name__ == "__main__":
    main()
