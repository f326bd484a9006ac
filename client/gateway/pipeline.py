"""What the live panel draws: devices, the replicas on them, the links between them. Read from a server's plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from client.errors import InvalidRequest


class _Part(BaseModel):
    """The plan has more than is drawn."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Replica(_Part):
    """A model of the server, and where it stands."""

    name: str
    device: str
    place: str = ""


class Device(_Part):
    """A GPU, or a set of CPUs."""

    name: str
    model: str | None = None
    why: str = ""


class Link(_Part):
    """What joins two devices."""

    first: str
    second: str
    link: str
    gigabytes_per_s: float | None = None


class _Encode(_Part):
    slots: int


class _Decode(_Part):
    max_sequences: int


class _Limits(_Part):
    max_in_flight: int
    max_waiting: int


class Pipeline(_Part):
    """The parts of `plan.json` that are drawn."""

    encoders: tuple[Replica, ...]
    decoders: tuple[Replica, ...]
    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    encode: _Encode
    decode: _Decode
    limits: _Limits

    def event(self) -> Mapping[str, object]:
        """Plain values for the panel."""
        devices = {device.name: device for device in self.devices}

        def replica(each: Replica, stage: str, room: int) -> dict[str, object]:
            place = each.place or each.device
            device = devices.get(place)
            model = device.model if device is not None else None
            return {"name": each.name, "stage": stage, "place": place, "hardware": model, "room": room}

        return {
            "replicas": [
                *(replica(each, "encode", self.encode.slots) for each in self.encoders),
                *(replica(each, "decode", self.decode.max_sequences) for each in self.decoders),
            ],
            "links": [link.model_dump() for link in self.links],
            "limits": self.limits.model_dump(),
        }


def pipeline_from(text: str, where: str = "plan") -> Pipeline:
    """The pipeline in a plan's JSON.

    Raises:
        InvalidRequest: it is no plan.
    """
    try:
        return Pipeline.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        reasons = (where, "is no plan of a server:", *(f"{step}:" for step in first["loc"]), first["msg"])
        raise InvalidRequest(" ".join(map(str, reasons))) from None


def read_pipeline(path: Path) -> Pipeline:
    """The pipeline in a `plan.json`; raises as `pipeline_from`."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return pipeline_from(text, str(path))
