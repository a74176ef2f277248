"""The forms in which clients ask models over HTTP: OpenAI's, Responses and Messages. No I/O: structs that
bound requests, and writers that turn pieces of text into answers and event streams. The driver is
`node.web.model_api`."""
