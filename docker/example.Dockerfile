# A program with a stage of its own, built in sluice:devel, run in sluice:runtime. Its source is
# examples/custom_stage.cpp; yours takes its place.
#
#   docker build --tag my-training --file docker/example.Dockerfile examples
#   docker run --rm my-training
ARG DEVEL=sluice:devel
ARG RUNTIME=sluice:runtime

FROM ${DEVEL} AS build
WORKDIR /home/sluice/program
COPY --chown=1000:1000 custom_stage.cpp program.cpp
RUN printf '%s\n' 'cmake_minimum_required(VERSION 3.25)' 'project(program LANGUAGES CXX)' \
      'find_package(Sluice REQUIRED)' 'add_executable(program program.cpp)' \
      'target_link_libraries(program PRIVATE Sluice::runtime)' >CMakeLists.txt && \
    cmake -G Ninja -B build -DCMAKE_BUILD_TYPE=Release && cmake --build build

FROM ${RUNTIME}
COPY --from=build /home/sluice/program/build/program /usr/local/bin/program
CMD ["mpirun", "--oversubscribe", "-n", "2", "program"]
