"""Lines of OpenAI's batch files, by the gateway's own rules."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping

from pydantic import ValidationError

from client.answer import Answer
from client.errors import InvalidRequest
from client.gateway.bodies import ChatBody, describe
from client.gateway.failure import Refused
from client.gateway.question import Question, question_from_chat
from client.gateway.settings import Settings
from client.gateway.wording import ChatWording

Written = Callable[[Answer], Mapping[str, object]]


def asked_from(body: object, wall_clock: Callable[[], float] = time.time) -> tuple[Question, Written]:
    """The question in a chat body, and how its answer is written down.

    Raises:
        InvalidRequest: what the gateway would answer with a status of 400, 404 or 413.
    """
    model = body.get("model") if isinstance(body, dict) else None
    settings = Settings(model=model) if isinstance(model, str) and model else Settings()  # one server, one model
    try:
        question = question_from_chat(ChatBody.model_validate(body), settings)
    except ValidationError as error:
        raise InvalidRequest(
            describe([{**each, "loc": ("body", *each["loc"])} for each in error.errors()])[0]
        ) from None
    except Refused as error:
        raise InvalidRequest(error.failure.message) from None

    def written(answer: Answer) -> Mapping[str, object]:
        request_id = uuid.uuid4().hex
        wording = ChatWording(request_id, int(wall_clock()), settings.model, question.num_top_logprobs, False)
        response = {"status_code": 200, "request_id": request_id, "body": wording.whole(answer)}
        return {"response": response, "error": None}

    return question, written
