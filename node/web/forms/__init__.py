"""The forms in which clients ask models over HTTP: OpenAI's, Responses and Messages. Pure: structs that bound
requests, and writers that make answers and event streams of pieces of text. The driver is
`node.web.model_api`."""
