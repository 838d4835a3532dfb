"""A process of files with faults: `python -m tests.unit.frontend.faulty_media FD PARENT_PID`."""

import os
import sys
import time
from multiprocessing.connection import Connection

from protocol.codec import Decoder, encode
from protocol.media import Media, MediaItem, MediaJob, ProcessedMedia

JOBS: Decoder[MediaJob] = Decoder(MediaJob)


def main() -> None:
    with Connection(int(sys.argv[1])) as connection:
        connection.recv_bytes()
        connection.send_bytes(encode(ProcessedMedia(b"", Media([]))))
        while True:
            (file,) = JOBS.decode(connection.recv_bytes()).files
            if file.url == "crash":
                os.abort()
            if file.url == "hang":
                time.sleep(600)
            connection.send_bytes(encode(ProcessedMedia(b"", Media([MediaItem(0, 1, file.url)]))))
            if file.url == "last":
                return


main()
