"""A process of images with faults: `python -m tests.unit.frontend.faulty_images FD PARENT_PID`."""

import os
import sys
import time
from multiprocessing.connection import Connection

from protocol.codec import Decoder, encode
from protocol.media import ImageJob, Media, MediaItem, ProcessedImages

JOBS: Decoder[ImageJob] = Decoder(ImageJob)


def main() -> None:
    with Connection(int(sys.argv[1])) as connection:
        connection.recv_bytes()
        connection.send_bytes(encode(ProcessedImages(b"", Media([]))))
        while True:
            (image,) = JOBS.decode(connection.recv_bytes()).images
            if image == "crash":
                os.abort()
            if image == "hang":
                time.sleep(600)
            connection.send_bytes(encode(ProcessedImages(b"", Media([MediaItem(0, 1, image)]))))
            if image == "last":
                return


main()
