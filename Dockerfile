# A node in a container.
#
#   docker build -t peerloom .                              a member, relay and door without torch; packages 98 MB
#   docker build -t peerloom:compute --target compute .     with torch: it computes stages too
#   docker run -v peerloom:/data -p 9747:9747/tcp -p 9747:9747/udp peerloom --announce HOST:9747
#
# deploy/compose.yml starts three of them.

FROM alpine:3.20 AS packages
RUN apk add --no-cache binutils py3-pip python3
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY crypto crypto
COPY dht dht
COPY gossip gossip
COPY node node
COPY partition partition
COPY sim sim
# What only those need who build on these packages goes: tests, stubs, headers, symbols.
RUN pip install --no-cache-dir --no-compile --quiet --target /packages -c constraints.txt . \
    && find /packages -type d -name tests -prune -exec rm -rf {} + \
    && find /packages -name '*.a' -delete \
    && find /packages -name '*.pyi' -delete \
    && rm -rf /packages/numpy/_core/include \
    && find /packages -name '*.so*' -exec strip --strip-unneeded {} +

# torch has no build for Alpine's C library. An index with builds for CPUs alone saves some gigabytes:
# --build-arg PIP_EXTRA_INDEX_URL=...
FROM python:3.12-slim AS compute
ARG PIP_EXTRA_INDEX_URL=""
WORKDIR /source
COPY --from=packages /source .
RUN pip install --no-cache-dir --quiet -c constraints.txt "$(grep '^torch==' constraints.txt)" \
    && pip install --no-cache-dir --quiet -c constraints.txt '.[compute,data,text]' scikit-learn \
    && rm -rf /source \
    && useradd --create-home peerloom && mkdir /data && chown peerloom /data
WORKDIR /data
USER peerloom
ENV PEERLOOM_DATA_DIR=/data PYTHONUNBUFFERED=1
VOLUME /data
EXPOSE 9747/tcp 9747/udp
HEALTHCHECK --start-period=30s CMD ["peerloom", "status"]
ENTRYPOINT ["peerloom"]

FROM alpine:3.20 AS node
RUN apk add --no-cache libstdc++ python3 \
    && adduser -D peerloom && mkdir /data && chown peerloom /data
COPY --from=packages /packages /usr/lib/python3.12/site-packages
RUN ln -s /usr/lib/python3.12/site-packages/bin/peerloom /usr/bin/peerloom
WORKDIR /data
USER peerloom
ENV PEERLOOM_DATA_DIR=/data PYTHONUNBUFFERED=1
VOLUME /data
EXPOSE 9747/tcp 9747/udp
HEALTHCHECK --start-period=30s CMD ["peerloom", "status"]
ENTRYPOINT ["peerloom"]
