// A simulation trains its own surrogate while it runs. Half of the ranks solve a heat equation
// whose conductivity grows with the temperature; the other half is a pipeline that learns from them
// what a point becomes in four steps, given the 5 x 5 points around it.   mpirun -n 4 in_situ The
// program has its own MPI: Sluice gets a communicator of the ranks that train.
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <random>
#include <vector>

#include <sluice/layers.hpp>
#include <sluice/mpi.hpp>
#include <sluice/pipeline.hpp>
using namespace sluice;

constexpr int kSide = 64, kAround = 2, kPatch = 25, kRounds = 300, kPatches = 128;

// Rows of a square of kSide x kSide points, cold at its border, with two rows of its neighbours.
struct Heat {
  MPI_Comm ranks;
  int rank = 0, size = 1, first = 0, rows = 0;
  std::vector<float> now, next;  // [rows + 4][kSide + 4]
  static constexpr int kWidth = kSide + 2 * kAround;
  explicit Heat(MPI_Comm communicator) : ranks(communicator) {
    MPI_Comm_rank(ranks, &rank);
    MPI_Comm_size(ranks, &size);
    first = kSide * rank / size;
    rows = kSide * (rank + 1) / size - first;
    now.resize(place(rows + kAround, -kAround));
    next = now;
  }
  static std::size_t place(int row, int column) {
    const int index = (row + kAround) * kWidth + column + kAround;
    return std::size_t(index);
  }
  float& at(int row, int column) { return now[place(row, column)]; }
  void heat(int row, int column, float by) {  // a spot, wherever it lies
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < kSide; ++c) {
        const float away =
            float((r + first - row) * (r + first - row) + (c - column) * (c - column));
        at(r, c) += by * std::exp(-away / 30);
      }
    }
  }
  void exchange_borders() {
    const int up = rank == 0 ? MPI_PROC_NULL : rank - 1;
    const int down = rank + 1 == size ? MPI_PROC_NULL : rank + 1;
    const int count = kAround * kWidth;
    MPI_Sendrecv(&at(0, -2), count, MPI_FLOAT, up, 0, &at(rows, -2), count, MPI_FLOAT, down, 0,
                 ranks, MPI_STATUS_IGNORE);
    MPI_Sendrecv(&at(rows - 2, -2), count, MPI_FLOAT, down, 1, &at(-2, -2), count, MPI_FLOAT, up, 1,
                 ranks, MPI_STATUS_IGNORE);
  }
  void step() {
    exchange_borders();
    const auto flow = [](float here, float there) {
      return (1 + (here + there) / 2) * (there - here);
    };
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < kSide; ++c) {
        const float here = at(r, c);
        next[place(r, c)] = here + 0.1F * (flow(here, at(r - 1, c)) + flow(here, at(r + 1, c)) +
                                           flow(here, at(r, c - 1)) + flow(here, at(r, c + 1)));
      }
    }
    now.swap(next);
  }
};

// Sends examples to the first rank that trains: kPatches patches, then what became of their
// centres.
void simulate(MPI_Comm ranks, int trainer) {
  Heat field(ranks);
  std::mt19937 random(1);  // the same on all ranks: spots are where all agree
  std::mt19937 places(std::mt19937::result_type(field.rank));
  const auto below = [](std::mt19937& from, int limit) { return int(from() % unsigned(limit)); };
  for (int round = 0; round < kRounds; ++round) {
    if (round % 10 == 0) field.heat(below(random, kSide), below(random, kSide), 0.8F);
    std::vector<float> examples;
    std::vector<std::pair<int, int>> centres;
    field.exchange_borders();
    for (int i = 0; i < kPatches; ++i) {
      const int row = below(places, field.rows), column = below(places, kSide);
      centres.emplace_back(row, column);
      for (int r = -kAround; r <= kAround; ++r) {
        for (int c = -kAround; c <= kAround; ++c) {
          examples.push_back(field.at(row + r, column + c));
        }
      }
    }
    for (int step = 0; step < 4; ++step) field.step();
    for (const auto& [row, column] : centres) examples.push_back(field.at(row, column));
    MPI_Send(examples.data(), int(examples.size()), MPI_FLOAT, trainer, 2, MPI_COMM_WORLD);
  }
}

void train(MPI_Comm ranks, int simulators) {
  const auto world = make_world(ranks);
  const Sequential model = Sequential({nn::linear(kPatch, 32), nn::tanh(), nn::linear(32, 32),
                                       nn::tanh(), nn::linear(32, 1)},
                                      nn::mse_loss())
                               .with_input({DType::kF32, {kPatch}});
  // Rank 0 of these gets the examples and passes whole batches.
  const BatchSpec batches{
      .inputs = {{DType::kF32, {kPatch}}}, .targets = {{DType::kF32, {1}}}, .feed = Feed::kRank0};
  PipelineOptions options{
      .shape = {.micro_batches = 4, .micro_batch_size = kPatches * simulators / 4}};
  options.training.learning_rate = {.peak = 3e-3, .steps = kRounds};
  Pipeline pipeline(*world, model, batches, options);
  const int samples = kPatches * simulators;
  std::vector<float> x(std::size_t(samples) * kPatch), y(std::size_t(samples), 0);
  double loss = 0;
  for (int round = 1; round <= kRounds; ++round) {
    Batch batch;
    if (world->rank() == 0) {
      std::vector<float> examples(kPatches * (kPatch + 1));
      for (int from = 0; from < simulators; ++from) {
        MPI_Recv(examples.data(), int(examples.size()), MPI_FLOAT, from, 2, MPI_COMM_WORLD,
                 MPI_STATUS_IGNORE);
        std::copy_n(examples.begin(), kPatches * kPatch, x.begin() + from * kPatches * kPatch);
        std::copy_n(examples.begin() + kPatches * kPatch, kPatches, y.begin() + from * kPatches);
      }
      batch = {.inputs = {view(x, {samples, kPatch})}, .targets = {view(y, {samples, 1})}};
    }
    loss += pipeline.train_step(batch).loss / 50;
    if (round % 50 != 0) continue;
    if (world->rank() == 0) std::printf("round %3d  loss %.2e\n", round, loss);
    loss = 0;
  }
}

int main(int argc, char** argv) {
  int level = 0, rank = 0, size = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const int simulators = size / 2;  // ranks 0 to simulators - 1
  MPI_Comm half;
  MPI_Comm_split(MPI_COMM_WORLD, rank < simulators ? 0 : 1, rank, &half);
  try {
    if (size < 2) throw Error(ErrorCode::kUsage, "in_situ needs at least 2 ranks");
    if (rank < simulators) {
      simulate(half, simulators);
    } else {
      train(half, simulators);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);  // other ranks may wait for this one
  }
  MPI_Comm_free(&half);
  return MPI_Finalize();
}
