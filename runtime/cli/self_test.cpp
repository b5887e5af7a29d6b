#include "runtime/cli/self_test.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <utility>

#include <sluice/compute.hpp>
#include <sluice/data.hpp>
#include <sluice/error.hpp>
#include <sluice/parameter.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/transformer.hpp>

#include "comm/base/index.hpp"
#include "comm/base/throw_error.hpp"
#include "comm/group/collectives.hpp"
#include "comm/mpi/mpi_session.hpp"
#include "runtime/doctor/network_probe.hpp"
#include "runtime/files/sha256.hpp"
#include "runtime/models/model_tensors.hpp"

namespace sluice {
namespace {

constexpr int kSelfTestTag = 0;
constexpr double kSelfTestSilence = 60;  // longer than a rank takes for its steps
constexpr const char* kStarted = "SLUICE_SELF_TEST";

// Tokens that depend on their place alone.
class MadeUpTokens : public DataSource {
 public:
  explicit MadeUpTokens(const TransformerConfig& model)
      : shapes_(make_token_shapes(model.context)), vocabulary_(model.vocabulary) {}
  std::vector<TensorSpec> input_specs(std::int64_t samples) const override {
    return shapes_->input_specs(samples);
  }
  std::vector<TensorSpec> target_specs(std::int64_t samples) const override {
    return shapes_->target_specs(samples);
  }
  void inputs(Phase, std::uint64_t, SampleRange range,
              std::span<const Tensor> into) const override {
    fill(range, 0, into[0]);
  }
  void targets(Phase, std::uint64_t, SampleRange range,
               std::span<const Tensor> into) const override {
    fill(range, 1, into[0]);
  }

 private:
  void fill(SampleRange range, std::int64_t ahead, const Tensor& into) const {
    const std::int64_t context = into.elements() / range.count;
    for (std::int64_t i = 0; i < into.elements(); ++i) {
      const std::int64_t place = range.first * context + i + ahead;
      into.as<std::int32_t>()[i] = static_cast<std::int32_t>((place * place + place) % vocabulary_);
    }
  }

  std::unique_ptr<DataSource> shapes_;
  int vocabulary_;
};

std::string lines_of(Pipeline& pipeline) {
  std::string lines;
  for (const Pipeline::Owned& owned : pipeline.parameters()) {
    if (!owned.owner) continue;
    const Tensor& value = owned.parameter->value;
    std::vector<std::byte> bytes(value.spec.bytes());
    copy_now(pipeline.compute().device(), bytes.data(), value.data, bytes.size());
    fmt::format_to(std::back_inserter(lines), "{} {}\n", owned.parameter->name, sha256_hex(bytes));
  }
  return lines;
}

// Of all parameters, as `sluice digest` prints it; the same on all ranks.
std::string digest_after_a_step(Communicator& world, const std::vector<DeviceChoice>& devices,
                                int layers) {
  const TransformerConfig model{.layers = layers, .heads = 2, .width = 32, .context = 16};
  PipelineOptions options;
  options.shape.micro_batches = 4;
  options.devices.choices = devices;
  const MadeUpTokens data(model);
  Pipeline pipeline(world, options, Transformer(model), data);
  pipeline.train_step();
  SilenceLimit silence(world.rank(), kSelfTestSilence, "the other ranks");
  Collectives collectives(world, kSelfTestTag, &silence);
  std::vector<ParameterDigest> digests;
  for (const std::string& lines : collectives.all_gather_strings(lines_of(pipeline))) {
    for (std::size_t begin = 0; begin < lines.size();) {
      const std::size_t space = lines.find(' ', begin), end = lines.find('\n', begin);
      digests.push_back({lines.substr(begin, space - begin),  //
                         lines.substr(space + 1, end - space - 1)});
      begin = end + 1;
    }
  }
  std::sort(digests.begin(), digests.end(),
            [](const ParameterDigest& a, const ParameterDigest& b) { return a.name < b.name; });
  pipeline.close();
  return digest_all(digests);
}

}  // namespace

void run_self_test(Communicator& world, const std::vector<DeviceChoice>& devices) {
  if (world.size() < 2) {
    throw Error(ErrorCode::kUsage,
                "--self-test compares one rank with several, and this job has one: start 'mpirun "
                "-n 2 sluice doctor --self-test', or the same without mpirun");
  }
  const int layers = std::max(4, world.size());
  const DeviceChoice mine = devices[at(world.rank()) % devices.size()];
  const std::string alone = digest_after_a_step(*world.split(world.rank(), 0), {mine}, layers);
  SilenceLimit silence(world.rank(), kSelfTestSilence, "the other ranks");
  Collectives collectives(world, kSelfTestTag, &silence);
  const std::vector<std::string> all = collectives.all_gather_strings(alone);
  const std::vector<std::string> hosts = collectives.all_gather_strings(mpi_info().host);
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    throw_error(ErrorCode::kMismatch,
                "self-test: rank 0 on {} and rank {} on {} compute other bits, each alone ({} and "
                "{}): use one kind of processor, device and library on all hosts; 'sluice doctor' "
                "lists them",
                hosts[0], rank, hosts[rank], all[0], all[rank]);
  }
  const std::string together = digest_after_a_step(world, devices, layers);
  if (together != alone) {
    throw_error(ErrorCode::kMismatch,
                "self-test: a step over {} ranks gives the digest {}, one rank alone {}: this "
                "installation computes wrong values",
                world.size(), together, alone);
  }
  if (world.rank() != 0) return;
  fmt::print("self-test  a step over {} ranks has the digest it must have, that of one rank:\n{}\n",
             world.size(), together);
}

void become_two_ranks(const std::vector<std::string>& arguments) {
  if (std::getenv(kStarted) != nullptr) return;
  // Root, more ranks than cores, and no network, for Open MPI 4.1 and 5.
  for (const auto& [name, value] : std::initializer_list<std::pair<const char*, const char*>>{
           {kStarted, "1"},
           {"OMPI_ALLOW_RUN_AS_ROOT", "1"},
           {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
           {"OMPI_MCA_rmaps_base_oversubscribe", "1"},
           {"PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"},
           {"OMPI_MCA_btl", "^tcp"}}) {
    ::setenv(name, value, /*overwrite=*/0);
  }
  std::vector<std::string> words = {
      "mpirun", "-n", "2", std::filesystem::read_symlink("/proc/self/exe").string(), "doctor"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  ::execvp(pointers[0], pointers.data());
  throw_error(ErrorCode::kMpi,
              "--self-test cannot start 'mpirun' ({}): install it or put it on the PATH",
              std::strerror(errno));
}

}  // namespace sluice
