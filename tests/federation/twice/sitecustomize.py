"""On the path of a SuperNode: with FAULT=twice every answer is sent twice, and while the file STALL
exists, answers are announced but not uploaded.
"""

import os
import sys
from pathlib import Path

if "flower-supernode" in sys.argv[0]:
    from flwr.supernode import start_client_internal as node

    real = node._push_messages

    def push(state, object_store, send, push_object):
        sent, contents = [], {}

        def noted(*content):
            sent.append(content)
            return send(*content)

        def kept(run_id, session, number, content):
            if Path(os.environ.get("STALL", "/nowhere")).exists():
                sys.stdout.write("stalling\n")
                raise RuntimeError("the upload breaks off")
            contents[number] = content
            push_object(run_id, session, number, content)

        real(state, object_store, noted, kept)
        if os.environ.get("FAULT") == "twice":
            for content in sent:
                numbers, session = send(*content)
                for number in numbers:
                    push_object(content[0].metadata.run_id, session, number, contents[number])
                sys.stdout.write("sent again\n")

    node._push_messages = push
