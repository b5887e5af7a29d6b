// Checkpoints: a pipeline's parameters, optimizer state and step in a directory, with what a
// program adds. Names are global, so a checkpoint loads under any layout.
//
// DIR/step-00001200/ is one save; it is complete before it gets its name. DIR/latest names the
// newest, for people. runtime/README.md describes files and protocol.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <sluice/options.hpp>
#include <sluice/parameter.hpp>
#include <sluice/tensor.hpp>

#pragma GCC visibility push(default)
namespace sluice {

class Pipeline;  // <sluice/pipeline.hpp>
struct StepReport;

// A program's or a data source's own state. It is taken on rank 0 and comes back on all ranks.
struct ProgramState {
  // JSON text of at most 100 levels and 4,000 keys an object. Spaces between its parts go.
  std::string json = "{}";
  std::map<std::string, HostTensor> tensors = {};  // by name
};

struct CheckpointOptions {
  std::filesystem::path directory = {};
  std::uint64_t every_steps = 0;  // 0: only save_now() saves
  double every_minutes = 0;       // since the last save began, by rank 0's clock; 0: never
  int keep = 2;                   // newest saves that stay, at least 1
  std::uint64_t keep_every = 0;   // saves of steps that are multiples stay as well; 0: none
  std::vector<std::uint64_t> skipped = {};  // of LoadedCheckpoint; recorded, grows here
  bool weights_only = false;                // an export, without optimizer state: cannot be resumed
  bool local = false;                       // every host has a directory of its own under this name
  // The directory may hold saves of another run, or of later steps than the pipeline's, which the
  // first save of this one replaces. Without it that is Error(kIo).
  bool overwrite = false;
  // LoadedCheckpoint::run where this run goes on from one: its saves are this run's own. Empty: a
  // new run. Any other text is Error(kUsage).
  std::string run = {};
  // Names of saves in the directory that LoadedCheckpoint::passed_over names: they do not count as
  // kept, and may be newer than the step that this run goes on from.
  std::vector<std::string> damaged = {};
  Facts options = {};      // recorded, in this order
  Facts data = {};         // recorded
  std::string model = {};  // JSON text, recorded; may be empty
  // What the parameters are called in the model's files. A part's name is a tensor's, used once.
  FileLayout layout = {};
  // Of parameters in the model's files: f32 or bf16. With bf16 the f32 values stand beside the
  // optimizer's state, unless weights_only, and load_checkpoint() takes those.
  DType precision = DType::kF32;
  // Further files of each save by name, such as config.json: what makes it a model's directory for
  // other programs. Rank 0's are written. Legal names: those of transformers and its tokenizers.
  std::map<std::string, std::string> files = {};
  // Is called on each rank before a save begins. Where it throws, all ranks throw, and nothing is
  // saved.
  std::function<void()> before_save = {};
};

// Saves while a pipeline trains. `pipeline` outlives it. All members are collective over the
// pipeline's ranks unless they say otherwise, and are called by the pipeline's thread. When a rank
// cannot write, every rank throws the same Error(kIo). Older saves stay as they are, the open one
// is given up, and the pipeline and the Checkpointer stay usable: training may go on, and the next
// save may succeed.
//
// A save blocks only while each rank copies its share into host memory, which it reuses. A thread
// without MPI writes it. Optimizer state that is offloaded is not copied: the next update waits
// until that thread has read it. A later after_step() publishes it once it is durable on all ranks.
class Checkpointer {
 public:
  // Takes the directory's lock, removes what a cut save left, finds out whether all hosts see the
  // directory (unless `local`). `note`: is called on rank 0 with lines for people, such as a save
  // that has to wait for the one before; may be empty. What it throws, all ranks throw; the
  // pipeline and the Checkpointer stay usable. PipelineOptions::Expert::save_copy puts the host
  // memory into the plan.
  Checkpointer(Pipeline& pipeline, CheckpointOptions options,
               std::function<void(const std::string&)> note = {});
  // Not collective. Waits for this rank's writer, abandons a save that is not published yet, and
  // releases the lock.
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  // State of the program, saved as `name` from now on. `take` runs on rank 0 at each save. Not
  // collective; the same names on all ranks. Throws Error(kUsage) for a null `take` and for a name
  // that is empty, has a '/' or was given before.
  void add_state(std::string name, std::function<ProgramState()> take);

  // To be called after each train_step(), also a skipped one. Publishes a save that all ranks have
  // written, and begins one that is due.
  void after_step(const StepReport& report);
  // Saves the present state and returns when it is published; at once where that has been done.
  // Also after an exception of the caller's own on all ranks. In the middle of a step the save is
  // that of the step before, and the step goes on.
  void save_now();

  // This rank asks the job to stop. Not collective, from any thread or signal handler.
  void request_stop() noexcept;
  // Whether any rank had asked, or DIR/stop existed, when the last step ended: the same on all
  // ranks. Not collective. The caller calls save_now() and ends.
  [[nodiscard]] bool stop_requested() const;
  // Directory of the newest save that this one published or found at its start; may be empty. Not
  // collective; on rank 0.
  [[nodiscard]] std::filesystem::path last_save() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Saves once, as a Checkpointer's save_now() does. Collective.
void save_checkpoint(Pipeline& pipeline, const CheckpointOptions& options);

// How much is compared with the saved hashes before a parameter changes: every file (ranks share
// them), what the ranks are about to read, or nothing.
enum class Verify { kFull, kRead, kOff };

// What a load does where the optimizer's state was saved in another precision than the pipeline
// keeps it in (OptimizerConfig::moments).
enum class OtherPrecision {
  kRefuse,
  kConvert,  // from bf16 to f32 exactly, from f32 to bf16 to nearest
};

// What a checkpoint holds besides values. The same on all ranks.
struct LoadedCheckpoint {
  std::filesystem::path directory;  // of the save
  std::string run;                  // for CheckpointOptions::run
  std::uint64_t step = 0;
  Facts options, data;                         // as recorded
  std::map<std::string, ProgramState> states;  // by name
  std::vector<std::uint64_t> skipped;          // steps that changed nothing
  // A line where CPUs that saved computed otherwise than these: with other kernels, another matrix
  // library, other threads or blocks of rows. The bits of an uninterrupted run may differ then.
  std::string arithmetic;
  // Of the pipeline that saved; 0: not recorded. With another number than
  // PipelineOptions::Shape has, the bits of an uninterrupted run differ from the next step on.
  int virtual_replicas = 0;
  int tensor_shards = 1;                                // likewise; always known
  GradientOrder gradient_order = GradientOrder::kStep;  // likewise
  std::vector<std::string> notes;        // saves that were broken and passed over: why
  std::vector<std::string> passed_over;  // the directories' names of those with a state.json
};

// Collective. Weights, optimizer state and step of `path`, which is a directory of saves (the
// newest that verifies), or one step's directory (that one). All ranks give the same path, where
// rank 0 looks for the newest. Throws Error(kMismatch) for paths that differ, Error(kWeights)
// naming what is missing, broken or does not fit, before any parameter changes; the pipeline stays
// usable.
LoadedCheckpoint load_checkpoint(Pipeline& pipeline, const std::filesystem::path& path,
                                 Verify verify = Verify::kFull,
                                 OtherPrecision state = OtherPrecision::kRefuse);

// Collective. Values of all parameters from such a path; the files may hold no other parameters.
void load_weights(Pipeline& pipeline, const std::filesystem::path& path,
                  Verify verify = Verify::kFull);

// Collective. The same from another program's files: model.safetensors, or parts with
// model.safetensors.index.json, of f32, bf16 or f16, where `layout` lists every parameter and
// buffer. Each rank reads its own tensors, one at a time.
void load_weights(Pipeline& pipeline, const std::filesystem::path& directory,
                  const FileLayout& layout);

}  // namespace sluice
#pragma GCC visibility pop
