# A node in a container: a relay and the command line, or with --build-arg EXTRAS=sampler (vllm, learner) what draws or
# leads too. docs/operations.md, "In a container", has the lines.
FROM python:3.12-slim AS build
ARG EXTRAS=""
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY swarm ./swarm
# The tree that CI tested, without numpy: vLLM's own needs want an older one.
RUN python -m venv /opt/echo-node \
    && sed -i '/^numpy==/d' constraints.txt \
    && /opt/echo-node/bin/pip install --no-cache-dir --constraint constraints.txt ".${EXTRAS:+[$EXTRAS]}"

FROM python:3.12-slim
COPY --from=build /opt/echo-node /opt/echo-node
RUN useradd --uid 10001 --home-dir /state --create-home echo
USER 10001
WORKDIR /state
ENV XDG_STATE_HOME=/state
VOLUME /state
EXPOSE 7700
STOPSIGNAL SIGTERM
ENTRYPOINT ["/opt/echo-node/bin/echo-node"]
CMD ["--help"]
