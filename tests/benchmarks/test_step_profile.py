"""Where the time of a step goes, from what TensorFlow's profiler records."""

import pytest
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from benchmarks import machine, step_profile

MS = 10**9  # Picoseconds.


def record(threads):
    """Returns a profile of (name, start, end) in ms, by the name of the thread."""
    space = xplane_pb2.XSpace()
    plane = space.planes.add(name="/host:CPU")
    for thread, events in threads.items():
        line = plane.lines.add(name=thread)
        for name, start, end in events:
            number = len(plane.event_metadata) + 1
            plane.event_metadata[number].name = name
            line.events.add(
                metadata_id=number, offset_ps=start * MS, duration_ps=(end - start) * MS
            )
    return space.SerializeToString()


def test_parts_of_a_step_add_up(monkeypatch):
    """Of 100 ms, 80 are computed; two threads compute at once for 20 of them."""
    monkeypatch.setattr(machine, "cores", lambda: 2)
    found = step_profile.summarize(
        record(
            {
                "tf_Compute/1": [
                    ("ExecutorState::Process", 0, 60),
                    ("tower_0/conv1/Conv2D:_MklNativeFusedConv2D", 0, 50),
                    ("update/mul:Mul", 90, 100),
                ],
                "tf_Compute/2": [
                    ("tower_0/norm/Cast:Cast", 30, 45),
                    ("gradient_tape/conv2/MatMul_1:BatchMatMulV2", 45, 60),
                    ("CpuExecutable::ExecuteAsyncOnStream", 60, 70),
                    ("tower_0/inner/mul:Mul", 62, 65),
                ],
                "tf_data_private/3": [("crop/Cast:Cast", 10, 50)],
                "python": [("EagerLocalExecute: __inference", 0, 100)],
            }
        ),
        steps=4,
    )
    assert found.pop("ms a step") == pytest.approx(25)
    assert found.pop("input, of all cores") == pytest.approx(0.2)
    assert sum(found.values()) == pytest.approx(1)
    assert {name: part for name, part in found.items() if part} == pytest.approx(
        {
            "convolutions": 0.4,
            "matrix products": 0.12,
            "casts": 0.12,
            "update": 0.08,
            "fused by XLA": 0.08,
            "Python, waiting": 0.2,
        }
    )
