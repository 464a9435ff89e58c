"""Reading HLO text: what a line says, and how often a loop runs where the compiler did not write it."""

import pytest

from zerojax.zero.hlo import Array, parse_hlo, trip_count

# A loop whose counter goes through a fusion (the comparison and the step), as XLA's CPU compiler writes them.
LOOP = """HloModule m, num_partitions=8

%stepping (p.0: s32[], p.1: s32[]) -> s32[] {{
  %p.0 = s32[] parameter(0)
  %p.1 = s32[] parameter(1)
  ROOT %next = s32[] {step}(%p.0, %p.1)
}}

%body (arg: (f32[4], s32[], s32[])) -> (f32[4], s32[], s32[]) {{
  %arg = (f32[4]{{0}}, s32[], /*index=2*/s32[]) parameter(0)
  %x = f32[4]{{0}} get-tuple-element(%arg), index=0
  %i = s32[] get-tuple-element(%arg), index=1
  %end = s32[] get-tuple-element(%arg), index=2
  %by = s32[] constant({by})
  %i.next = s32[] fusion(%i, %by), kind=kLoop, calls=%stepping
  ROOT %out = (f32[4]{{0}}, s32[], s32[]) tuple(%x, %i.next, %end)
}}

%condition (arg.1: (f32[4], s32[], s32[])) -> pred[] {{
  %arg.1 = (f32[4]{{0}}, s32[], s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%arg.1), index=1
  %end.1 = s32[] get-tuple-element(%arg.1), index=2
  ROOT %goes_on = pred[] compare(%i.1, %end.1), direction={direction}
}}

ENTRY %main (x.1: f32[4]) -> (f32[4], s32[], s32[]) {{
  %x.1 = f32[4]{{0}} parameter(0)
  %n = s32[] parameter(1)
  %start = s32[] constant({start})
  %copied = s32[] copy(%start)
  %stop = s32[] constant({stop})
  %init = (f32[4]{{0}}, s32[], s32[]) tuple(%x.1, %copied, %{end})
  ROOT %loop = (f32[4]{{0}}, s32[], s32[]) while(%init), condition=%condition, body=%body{config}
}}
"""


def loop_trips(*, start=0, stop=7, by=1, step="add", direction="LT", end="stop", config=""):
    text = LOOP.format(start=start, stop=stop, by=by, step=step, direction=direction, end=end, config=config)
    module = parse_hlo(text)
    entry = module.computations[module.entry]
    return trip_count(module, entry, entry.instructions["loop"])


@pytest.mark.parametrize(
    ("settings", "trips"),
    [
        (dict(), len(range(7))),
        (dict(start=2, stop=12, by=3), len(range(2, 12, 3))),
        (dict(direction="LE"), len(range(0, 8))),
        (dict(start=9, stop=-1, by=2, step="subtract", direction="GT"), len(range(9, -1, -2))),
        (dict(start=9), 0),
        (dict(end="n"), None),  # the end is an argument of the program
        (dict(by=0), None),  # never ends
        (dict(end="n", config=', backend_config={"known_trip_count":{"n":"24"},"known_init_step":{"init":"0"}}'), 24),
        (dict(end="n", config=r', backend_config="{\"known_trip_count\":{\"n\":\"24\"}}"'), 24),
    ],
)
def test_trip_count(settings, trips):
    assert loop_trips(**settings) == trips


def test_an_instruction_is_read():
    module = parse_hlo("""HloModule m, replica_count=2, num_partitions=4

FileNames
1 "/models/net.py"

FunctionNames
1 "layer"

FileLocations
1 {file_name_id=1 function_name_id=1 line=40 end_line=40 column=8 end_column=8}
2 {file_name_id=1 function_name_id=1 line=52 end_line=52 column=8 end_column=8}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}

ENTRY %main (x: bf16[8,16]) -> bf16[32,16] {
  %x = bf16[8,16]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %y-start = ((bf16[8,16]{1,0}, f8e4m3fn[2]{0}), /*index=1*/(bf16[32,16]{1,0}, f8e4m3fn[8])) all-gather-start(%x, bf16[8,16]{1,0} %x), dimensions={0}, metadata={op_name="jit(f)/calls=%no {" stack_frame_id=2}
  ROOT %y-done = (bf16[32,16]{1,0}, f8e4m3fn[8]{0}) all-gather-done(%y-start)
}, execution_thread="main"
""")  # noqa: E501
    assert (module.entry, module.replicas, module.partitions) == ("main", 2, 4)
    start = module.computations["main"].instructions["y-start"]
    assert start.opcode == "all-gather-start"
    assert start.operands == ("x", "x")
    assert start.arrays == (
        Array("bf16", (8, 16)),
        Array("f8e4m3fn", (2,)),
        Array("bf16", (32, 16)),
        Array("f8e4m3fn", (8,)),
    )
    assert start.callees == {}
    assert start.op_name == "jit(f)/calls=%no {"
    assert start.source == "/models/net.py:52"
    assert module.computations["main"].root == "y-done"


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("pred", 8), ("s4", 4), ("u4", 4), ("s8", 8), ("f8e5m2", 8), ("bf16", 16), ("f16", 16), ("u32", 32), ("c64", 64)],
)
def test_bytes_of_a_dtype(dtype, bits):
    assert Array(dtype, (3, 8)).bytes == 3 * 8 * bits / 8


def test_text_without_a_program():
    with pytest.raises(ValueError, match="ENTRY"):
        parse_hlo("nothing")
