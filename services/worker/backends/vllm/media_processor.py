"""The process that decodes images and sounds and computes the encoder's inputs with vLLM's processor:
`python -m services.worker.backends.vllm.media_processor FD PARENT_PID`.

A frontend starts it beside itself. Files of strangers are decoded here only, so a crash, a hang or a lack of memory
ends one request.
"""

import base64
import binascii
import contextlib
import io
import logging
import resource
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
from PIL import Image

from protocol.codec import Decoder, encode, pack, unpack
from protocol.media import (
    MAX_MEDIA_BYTES,
    Media,
    MediaFailed,
    MediaFile,
    MediaItem,
    MediaJob,
    MediaOutcome,
    MediaRefused,
    ProcessedMedia,
    ProcessorSettings,
    named,
)
from services.process import die_with_parent
from services.worker.backends.vllm import vllm_api
from services.worker.backends.vllm.engine_config import MODALITIES
from services.worker.backends.vllm.media_inputs import pack_features

MEMORY = 4 << 30
"""Bytes of memory beside those of the libraries."""
MAX_PIXELS = 64 << 20
"""Pixels of one image."""
MAX_SECONDS = 600
"""Length of one sound."""
MAX_SAMPLES = 64 << 20
"""Samples of all channels of one sound."""
MAX_LEVEL = 1 << 16
"""Samples of most files are between -1 and 1, of some between -32768 and 32767. What is not even finite would make
numbers of other requests infinite."""
RATES = range(4000, 192_001)
"""Samples per second of one channel."""
FORMATS = {"image": ("PNG", "JPEG", "WEBP"), "audio": ("WAV", "MP3", "FLAC", "OGG")}
_JOBS: Decoder[MediaJob] = Decoder(MediaJob)
_SETTINGS: Decoder[ProcessorSettings] = Decoder(ProcessorSettings)
log = logging.getLogger(__name__)


class FileRefused(Exception):
    """The text says what is wrong with a file."""


class MediaProcessor:
    def __init__(self, settings: ProcessorSettings) -> None:
        overrides = msgspec.json.decode(settings.model.hf_overrides, type=dict[str, Any])
        arguments = vllm_api.EngineArgs(
            settings.directory, dtype=settings.model.dtype, hf_overrides=overrides, limit_mm_per_prompt=MODALITIES
        )
        self._processor = vllm_api.MULTIMODAL_REGISTRY.create_processor(arguments.create_model_config())

    def process(self, job: MediaJob) -> ProcessedMedia:
        """Raises: FileRefused"""
        info, files = self._processor.info, dict[str, list[Any]]()
        for name, file in named(job.files).items():
            if not info.allowed_mm_limits.get(file.kind):
                raise FileRefused(f"this model reads no {file.kind}")
            files.setdefault(file.kind, []).append(_decode(file, name))
        try:
            items = info.parse_mm_data(files)
            found = self._processor.apply(
                vllm_api.ProcessorInputs(unpack(job.token_ids).tolist(), items), vllm_api.TimingContext(enabled=False)
            )
        except (ValueError, AssertionError, RuntimeError) as error:
            why = f"the model's processor refuses the files, or the chat template does not show them: {error}"
            raise FileRefused(why.removesuffix(": ")) from error
        features = []
        for kind, given in files.items():
            places = found["mm_placeholders"][kind]
            if len(places) != len(given):
                raise FileRefused(f"the chat template of this model does not show each {kind}")
            for place, digest, data in zip(places, found["mm_hashes"][kind], found["mm_kwargs"][kind], strict=True):
                features.append(vllm_api.MultiModalFeatureSpec(data, kind, digest, place, digest))
        features.sort(key=lambda feature: feature.mm_position.offset)
        spans = [(feature.mm_position, feature.identifier) for feature in features]
        data = pack_features(features)
        if len(data) > MAX_MEDIA_BYTES:
            raise FileRefused(f"the files become {len(data)} bytes of tensors, but at most {MAX_MEDIA_BYTES}")
        media = Media([MediaItem(at.offset, at.length, digest) for at, digest in spans], data)
        return ProcessedMedia(pack(found["prompt_token_ids"]), media)


def _decode(file: MediaFile, name: str) -> Any:
    """Return a file as vLLM decodes it. Raises: FileRefused"""
    _, _, text = file.url.partition(",")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise FileRefused(f"{name} is not valid base64") from None
    try:
        return _image(data, name) if file.kind == "image" else _sound(data, name)
    except (FileRefused, MemoryError):
        raise
    except ImportError as error:
        raise FileRefused(f"{name} is not served: this server has no library for it ({error})") from error
    except Exception as error:  # Pillow's decoders raise exceptions of many types
        raise FileRefused(f"{name} is no {', '.join(FORMATS[file.kind])} file, or it is broken") from error


def _image(data: bytes, name: str) -> Any:
    with Image.open(io.BytesIO(data), formats=FORMATS["image"]) as image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise FileRefused(f"{name} has {width} x {height} pixels, but at most {MAX_PIXELS} are served")
        # A JPEG file with further pictures behind it, as telephones write it, is "MPO" to Pillow.
        if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
            raise FileRefused(f"{name} has several frames; video is not served")
    reader = vllm_api.ImageMediaIO()
    return reader.load_bytes(data)


def _sound(data: bytes, name: str) -> Any:
    """Return float32[samples] and the sample rate."""
    import soundfile  # beside images it is not needed

    with soundfile.SoundFile(io.BytesIO(data)) as file:
        if file.format not in FORMATS["audio"]:
            raise ValueError(file.format)
        rate, channels, length = file.samplerate, file.channels, file.frames
        if rate not in RATES or not 0 < length <= MAX_SECONDS * rate or length * channels > MAX_SAMPLES:
            raise FileRefused(
                f"{name} has {length} samples in {channels} channels at {rate} Hz, but 1 to {MAX_SAMPLES} samples, "
                f"{MAX_SECONDS} s, and {RATES[0]} to {RATES[-1]} Hz are served"
            )
    samples, rate = vllm_api.load_audio_soundfile(io.BytesIO(data), sr=None)
    if not samples.size or not (abs(samples) <= MAX_LEVEL).all():
        raise FileRefused(f"{name} has no samples, or some beyond {MAX_LEVEL}")
    return samples, rate


def _answer(processor: MediaProcessor, data: bytes) -> MediaOutcome:
    try:
        return processor.process(_JOBS.decode(data))
    except FileRefused as error:
        return MediaRefused(str(error)[:1000])
    except MemoryError:
        return MediaRefused("processing the files takes too much memory")
    except Exception as error:
        log.exception("the processor of files failed")
        return MediaFailed(f"the model's processor failed ({type(error).__name__})")


def _limit_memory() -> None:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    used = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, used + MEMORY))


def main(descriptor: str, parent: str) -> int:
    die_with_parent(int(parent))
    with Connection(int(descriptor)) as connection:
        try:
            processor = MediaProcessor(_SETTINGS.decode(connection.recv_bytes()))
        except Exception as error:  # of any library that reads the checkpoint
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            connection.send_bytes(encode(MediaFailed(reason[:1000])))
            return 1
        _limit_memory()
        connection.send_bytes(encode(ProcessedMedia(b"", Media([]))))
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                connection.send_bytes(encode(_answer(processor, connection.recv_bytes())))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
