# An image that serves a model: see docs/installing.md.
FROM python:3.11-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++
COPY . /src
RUN python3 -m venv /opt/edgedec
RUN /opt/edgedec/bin/pip install --no-cache-dir /src

FROM python:3.11-slim-bookworm
COPY --from=build /opt/edgedec /opt/edgedec
RUN useradd --create-home edgedec && install -d -o edgedec /models
ENV PATH=/opt/edgedec/bin:$PATH EDGEDEC_CACHE=/models EDGEDEC_HOST=0.0.0.0
USER edgedec
VOLUME /models
EXPOSE 8080
ENTRYPOINT ["edgedec"]
CMD ["serve", "smollm2-135m"]
