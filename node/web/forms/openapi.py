"""`/openapi.json`: the requests of the HTTP door of models, generated from the structs that read them."""

from functools import cache
from typing import Any

import msgspec

from node.web.forms.completions import ChatRequest, CompletionRequest
from node.web.forms.embeddings import EmbeddingsRequest
from node.web.forms.messages import MessagesRequest
from node.web.forms.responses import ResponsesRequest

FORMS = {
    "/v1/completions": (CompletionRequest, "Continue a text, or tokens."),
    "/v1/chat/completions": (ChatRequest, "Answer a conversation."),
    "/v1/responses": (ResponsesRequest, "Answer a conversation, in the form of agents; nothing is stored."),
    "/v1/embeddings": (EmbeddingsRequest, "Compute vectors of texts."),
    "/v1/messages": (MessagesRequest, "Answer a conversation, in Anthropic's form."),
}
LOOKS = {
    "/v1/models": "List the models that answer now.",
    "/health": "Check that this node runs; needs no key.",
}


@cache
def document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document."""
    kinds = [kind for kind, _ in FORMS.values()]
    schemas, parts = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {
        path: {
            "post": {
                "summary": text,
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": {
                    "200": {"description": "The answer, or with stream: true its events."},
                    "4XX": {"description": "The problem with the request, in the form of this API."},
                    "503": {"description": "No peer holds a part of the model now."},
                },
            }
        }
        for (path, (_, text)), schema in zip(FORMS.items(), schemas, strict=True)
    }
    paths |= {
        path: {"get": {"summary": text, "responses": {"200": {"description": "JSON."}}}}
        for path, text in LOOKS.items()
    }
    scheme = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Peerloom", "version": "1", "description": "Models of this swarm."},
        "paths": paths,
        "components": {"schemas": parts, "securitySchemes": {"key": scheme}},
        "security": [{"key": []}],
    }
