# Weightstream in a container, with the versions of constraints.txt. Run in the root of a checkout or of an unpacked sdist:
#   docker build -t weightstream .
#   docker build -t weightstream:cuda --build-arg BASE=nvidia/cuda:13.0.1-base-ubuntu24.04 --build-arg TORCH=cuda .
#   docker run --rm -v "$PWD:/work" weightstream generate dataset.path=prompts.jsonl
# BASE: Debian or Ubuntu with Python 3.11 or newer. TORCH: cpu or cuda; the CUDA build brings the libraries of CUDA.
ARG BASE=debian:bookworm-slim
FROM ${BASE}
ARG TORCH=cpu
ARG EXTRAS=gguf,sentencepiece,structured,s3,serve,eval
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY conf ./conf
COPY jobs ./jobs
COPY runtime ./runtime
COPY weightstream ./weightstream
COPY scripts/install_image.sh ./
RUN sh install_image.sh
ENV PATH=/opt/weightstream/bin:$PATH
RUN useradd --create-home --uid 10001 weightstream
USER 10001
WORKDIR /work
ENTRYPOINT ["weightstream"]
CMD ["--help"]
