"""What of a configuration is refused, and what of it needs nothing."""

from collections.abc import Iterator
from typing import Any

from zerojax.config.deepspeed.keys import BY_PATH, Key, Status
from zerojax.config.deepspeed.reader import RawConfig
from zerojax.errors import shown

THRESHOLD = "zero_optimization.stage3_param_persistence_threshold"
# By `Zero.offload`'s names: the key, its old name, and the stages that DeepSpeed reads it at.
OFFLOAD = {
    "optimizer": ("zero_optimization.offload_optimizer.device", "zero_optimization.cpu_offload", (1, 2, 3)),
    "params": ("zero_optimization.offload_param.device", "zero_optimization.cpu_offload_param", (3,)),
}


def check_supported(raw: RawConfig) -> None:
    """Raises a UserError that names the first key which asks for what zerojax does not do, what to do instead, and
    the other such keys."""
    device, _, _ = OFFLOAD["params"]
    if raw.get(device) == "nvme":
        raise raw.error(
            device,
            " is 'nvme', which is not supported: the optimizer's state alone lies in files; accepted: 'none' or 'cpu' "
            "here, and 'nvme' as offload_optimizer.device",
        )
    refused = list(dict.fromkeys(_refused(raw)))
    if refused:
        key, *others = refused
        value = " is given," if key.section else f" is {shown(raw.get(key.path))},"
        more = f" (and so are {', '.join(other.path for other in others)})" if others else ""
        accepted = "to leave it out" if key.section else shown(key.default)
        raise raw.error(key.path, f"{value} which is not supported: {_plain(key.why)}; accepted: {accepted}{more}")


def notes(raw: RawConfig) -> tuple[str, ...]:
    """A line for each key that was given and needs nothing.

    >>> from zerojax.config.deepspeed.reader import read
    >>> notes(read({"zero_optimization": {"overlap_comm": True}}))
    ('zero_optimization.overlap_comm = True: XLA schedules the collectives of the compiled step',)
    """
    told = {path: _plain(BY_PATH[path].why) for path in raw.values if _needs_nothing(raw, path)}
    if THRESHOLD in raw.values and raw.get("zero_optimization.stage") != 3:
        told[THRESHOLD] = "read at stage 3 alone"
    for device, old, stages in OFFLOAD.values():
        if offload_is_asked(raw, device, old) and raw.get("zero_optimization.stage") not in stages:
            told[device if device in raw.values else old] = f"read at {_stages(stages)} alone"
    return tuple(f"{path} = {shown(raw.get(path))}: {why}" for path, why in told.items())


def offload_is_asked(raw: RawConfig, device: str, old: str) -> bool:
    """Whether the key `device`, or `old` that it replaced, says that something leaves the device between steps."""
    return raw.get(device) in ("cpu", "nvme") or raw.get(old) is True


def _stages(numbers: tuple[int, ...]) -> str:
    return f"stages {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"stage {numbers[0]}"


def _needs_nothing(raw: RawConfig, path: str) -> bool:
    return path in BY_PATH and BY_PATH[path].status is Status.NEEDLESS and not raw.is_off(path)


def _refused(raw: RawConfig) -> Iterator[Key]:
    """The keys or whole sections that are refused, in the order they were written."""
    for path, value in raw.values.items():
        if raw.is_off(path):
            continue
        around = [BY_PATH[section] for section in _sections(path)]
        whole = next((key for key in around if key.status is Status.REFUSED), None)
        if whole is not None:
            if not raw.is_off(whole.path):
                yield whole
        elif path in BY_PATH and _asks(BY_PATH[path], value) and not _within_refused_feature(raw, path):
            yield BY_PATH[path]


def _asks(key: Key, value: Any) -> bool:
    return key.status is Status.REFUSED and key.asks_for_something(value)


def _within_refused_feature(raw: RawConfig, path: str) -> bool:
    """Whether the switch of the key's section is refused already."""
    switch = BY_PATH.get(f"{path.rpartition('.')[0]}.enabled")
    return switch is not None and switch.path != path and _asks(switch, raw.get(switch.path))


def _sections(path: str) -> Iterator[str]:
    """The sections around a key, from the outermost."""
    parts = path.split(".")
    return (".".join(parts[:depth]) for depth in range(1, len(parts)))


def _plain(text: str) -> str:
    """The text without the marks that documentation sets."""
    return text.replace("`", "")
