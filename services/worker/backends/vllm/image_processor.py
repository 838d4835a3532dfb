"""The process that decodes images and computes the encoder's inputs with vLLM's processor:
`python -m services.worker.backends.vllm.image_processor FD PARENT_PID`.

A frontend starts it beside itself. Files of strangers are decoded here only, so a crash, a hang or a lack of memory
ends one request.
"""

import base64
import binascii
import contextlib
import io
import logging
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from PIL import Image

from protocol.codec import Decoder, encode, pack, unpack
from protocol.media import (
    MAX_MEDIA_BYTES,
    ImageJob,
    ImagesFailed,
    ImagesOutcome,
    ImagesRefused,
    Media,
    MediaItem,
    ProcessedImages,
    ProcessorSettings,
)
from services.process import die_with_parent
from services.worker.backends.vllm import vllm_api
from services.worker.backends.vllm.engine_config import IMAGES_ONLY
from services.worker.backends.vllm.media_inputs import pack_features

MEMORY = 4 << 30
"""Bytes of memory beside those of the libraries."""
MAX_PIXELS = 64 << 20
"""Pixels of one image."""
FORMATS = ("PNG", "JPEG", "WEBP")
_JOBS: Decoder[ImageJob] = Decoder(ImageJob)
_SETTINGS: Decoder[ProcessorSettings] = Decoder(ProcessorSettings)
log = logging.getLogger(__name__)


class ImageRefused(Exception):
    """The text says what is wrong with an image."""


class ImageProcessor:
    def __init__(self, settings: ProcessorSettings) -> None:
        arguments = vllm_api.EngineArgs(
            model=settings.model, dtype=settings.dtype, limit_mm_per_prompt=IMAGES_ONLY
        )
        self._processor = vllm_api.MULTIMODAL_REGISTRY.create_processor(arguments.create_model_config())

    def process(self, job: ImageJob) -> ProcessedImages:
        """Raises: ImageRefused"""
        images = [_decode(url, f"image {number}") for number, url in enumerate(job.images)]
        info = self._processor.info
        try:
            items = info.parse_mm_data({"image": images})
            found = self._processor.apply(
                vllm_api.ProcessorInputs(unpack(job.token_ids).tolist(), items),
                vllm_api.TimingContext(enabled=False),
            )
        except (ValueError, AssertionError, RuntimeError) as error:
            why = (
                f"the model's processor refuses the images, or the chat template does not show them: {error}"
            )
            raise ImageRefused(why.removesuffix(": ")) from error
        places, features = found["mm_placeholders"]["image"], []
        if len(places) != len(images):
            raise ImageRefused("the chat template of this model does not show the images")
        for number, place in enumerate(places):
            digest = found["mm_hashes"]["image"][number]
            data = found["mm_kwargs"]["image"][number]
            features.append(vllm_api.MultiModalFeatureSpec(data, "image", digest, place, digest))
        features.sort(key=lambda feature: feature.mm_position.offset)
        spans = [(feature.mm_position, feature.identifier) for feature in features]
        data = pack_features(features)
        if len(data) > MAX_MEDIA_BYTES:
            raise ImageRefused(
                f"the images become {len(data)} bytes of tensors, but at most {MAX_MEDIA_BYTES}"
            )
        media = Media([MediaItem(at.offset, at.length, digest) for at, digest in spans], data)
        return ProcessedImages(pack(found["prompt_token_ids"]), media)


def _decode(url: str, name: str) -> Any:
    """Return the image of a data URL as vLLM decodes it. Raises: ImageRefused"""
    _, _, text = url.partition(",")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ImageRefused(f"{name} is not valid base64") from None
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise ImageRefused(
                    f"{name} has {width} x {height} pixels, but at most {MAX_PIXELS} are served"
                )
            if getattr(image, "n_frames", 1) > 1:
                raise ImageRefused(f"{name} has several frames; video is not served")
        reader = vllm_api.ImageMediaIO()
        return reader.load_bytes(data)
    except (ImageRefused, MemoryError):
        raise
    except Exception as error:  # Pillow's decoders raise exceptions of many types
        raise ImageRefused(f"{name} is no {', '.join(FORMATS)} file, or it is broken") from error


def _answer(processor: ImageProcessor, data: bytes) -> ImagesOutcome:
    try:
        return processor.process(_JOBS.decode(data))
    except ImageRefused as error:
        return ImagesRefused(str(error)[:1000])
    except MemoryError:
        return ImagesRefused("processing the images takes too much memory")
    except Exception as error:
        log.exception("the processor of images failed")
        return ImagesFailed(f"the model's processor failed ({type(error).__name__})")


def _limit_memory() -> None:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    used = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, used + MEMORY))


def main(descriptor: str, parent: str) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to a whole group; open requests still finish
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(int(parent))
    with Connection(int(descriptor)) as connection:
        try:
            processor = ImageProcessor(_SETTINGS.decode(connection.recv_bytes()))
        except Exception as error:  # of any library that reads the checkpoint
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            connection.send_bytes(encode(ImagesFailed(reason[:1000])))
            return 1
        _limit_memory()
        connection.send_bytes(encode(ProcessedImages(b"", Media([]))))
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                connection.send_bytes(encode(_answer(processor, connection.recv_bytes())))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
